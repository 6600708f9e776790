// Which model is asked: the choice in the masthead.

import { h } from "./dom.js";
import { listModels } from "./api.js";

const CHOSEN = "quire.model";

export class ModelChoice {
  constructor(select, onchange) {
    this.select = select;
    select.addEventListener("change", () => {
      localStorage.setItem(CHOSEN, select.value);
      onchange();
    });
  }

  get value() {
    return this.select.value;
  }

  /** Take over the model of a conversation, if it is still served. */
  choose(name) {
    if ([...this.select.options].some((option) => option.value === name)) this.select.value = name;
  }

  async refresh() {
    const models = await listModels();
    const chosen = this.select.value || localStorage.getItem(CHOSEN);
    this.select.replaceChildren(
      ...models.map(({ id, parent, max_model_len: length }) => {
        const more = parent ? ` (adapter of ${parent})` : length === null ? " (loads when asked)" : "";
        return h("option", { value: id }, id + more);
      }),
    );
    this.choose(chosen);
  }
}
