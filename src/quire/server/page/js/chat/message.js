// One message on the page.

import { h, iconButton, announce } from "../dom.js";
import { Prose, copyText } from "../prose.js";
import { describeStats } from "./answer.js";

export class MessageView {
  /** `actions`: edit(text) for what people wrote, retry() and, for the last one, goOn() for what came back; turn(step)
   *  to other versions. */
  constructor(message, name, actions) {
    this.message = message;
    this.actions = actions;
    this.mine = message.role === "user";
    this.body = h(".body");
    this.footer = h("footer");
    this.element = h(
      `article.message.${this.mine ? "user" : "model"}`,
      { "aria-label": this.mine ? "You" : name },
      h("header", h("span.label", this.mine ? "You" : name), this.#versions(), this.#tools()),
      this.body,
      this.footer,
    );
    if (this.mine) this.#showSaid();
    else {
      this.prose = new Prose();
      this.update(false);
    }
  }

  #versions() {
    const { at, tails } = this.message.versions ?? { tails: [] };
    if (tails.length < 2) return null;
    const button = (name, label, step) =>
      iconButton(name, label, () => this.actions.turn(step), { disabled: !tails[at + step] });
    return h(
      ".versions",
      button("back", "Version before", -1),
      h("span", { "aria-label": `Version ${at + 1} of ${tails.length}` }, `${at + 1}/${tails.length}`),
      button("forth", "Version after", 1),
    );
  }

  #tools() {
    const copy = iconButton("copy", "Copy", async () => {
      await copyText(this.message.content);
      announce("Copied");
    });
    const change = this.mine
      ? iconButton("edit", "Edit and ask again", () => this.edit())
      : iconButton("retry", "Answer again", () => this.actions.retry());
    return h(".tools", copy, change);
  }

  #showSaid() {
    this.body.replaceChildren(h(".said", this.message.content));
  }

  edit() {
    const before = document.activeElement;
    const input = h("textarea", { value: this.message.content, rows: "4", "aria-label": "Message" });
    const close = () => {
      this.#showSaid();
      before.focus();
    };
    const form = h(
      "form",
      {
        onsubmit: (event) => {
          event.preventDefault();
          if (input.value.trim()) this.actions.edit(input.value.trim());
        },
        onkeydown: (event) => {
          if (event.key === "Escape") {
            event.stopPropagation();
            close();
          } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
            event.preventDefault();
            form.requestSubmit();
          }
        },
      },
      input,
      h(".dialog-buttons", h("button", { type: "button", onclick: close }, "Cancel"), h("button.primary", "Ask again")),
    );
    this.body.replaceChildren(form);
    input.focus();
    input.setSelectionRange(input.value.length, input.value.length);
  }

  /** The answer has grown, or has ended. */
  update(writing) {
    const { content, reasoning, stats, finish, error } = this.message;
    this.element.classList.toggle("writing", writing);
    if (reasoning) this.#reason(reasoning, writing && !content);
    if (!this.prose.element.isConnected) this.body.append(this.prose.element);
    this.prose.set(content);
    const again = () => h("button", { type: "button", onclick: () => this.actions.retry() }, "Try again");
    const problem = error && h("p.problem", { role: "alert" }, h("span", error), again());
    const cut = !writing && !error && content && ["length", "stopped"].includes(finish) && this.actions.goOn;
    const goOn = cut && h("button.go-on", { type: "button", onclick: cut }, "Go on");
    this.footer.replaceChildren(...[problem, stats?.tokens && describeStats(stats, finish), goOn].filter(Boolean));
  }

  #reason(text, thinking) {
    if (!this.reasoning) {
      this.thoughts = new Prose();
      this.summary = h("summary");
      this.reasoning = h("details.reasoning", this.summary, this.thoughts.element);
      this.body.prepend(this.reasoning);
    }
    this.summary.textContent = thinking ? "Thinking…" : "What it thought";
    this.thoughts.set(text);
  }
}
