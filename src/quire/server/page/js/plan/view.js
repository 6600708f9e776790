// The plan: what is chosen is asked of the server, one question at a time, and the last one wins.

import { makePlan } from "../api.js";
import { h } from "../dom.js";
import { whole } from "../engine/units.js";
import { defaults, fromAddress, toAddress, toBody } from "./choices.js";
import { Controls } from "./controls.js";
import { Memory } from "./memory.js";
import { Ceilings, advicePanel, attentionPanel, draftsPanel, formulasPanel, otherEnginesPanel, stepsPanel, usersPanel } from "./panels.js";
import { inCount } from "./units.js";

const PAUSE = 60; // milliseconds before a question: a slider that is dragged passes many stops
const PATIENCE = 3000; // milliseconds until a server that cannot answer now is asked again
const FOR_NOW = new Set([0, 429, 503]);

export class PlanView {
  constructor(element) {
    this.choices = defaults();
    this.title = h("h2", "Plan");
    this.about = h("p.about", "counting …");
    this.state = h("p.trouble", { role: "alert", hidden: true });
    this.controls = new Controls((change) => this.#choose(change));
    this.memory = new Memory();
    this.ceilings = new Ceilings();
    this.panels = h(".panels");
    this.results = h(".results", { hidden: true }, this.memory.element, h(".below", this.ceilings.element, this.panels));
    element.append(h("header.plan-head", this.title, this.about), this.state, h(".planner", this.controls.element, this.results));
  }

  /** `query`: the part of the address behind #plan?; without it, what was chosen last. */
  start(model, query) {
    const changed = !this.wanted || model !== this.model || (query !== undefined && toAddress(fromAddress(query)) !== toAddress(this.choices));
    if (query !== undefined) this.choices = fromAddress(query);
    this.model = model;
    this.wanted = true;
    this.#address();
    this.controls.show(this.choices, this.model, this.known);
    if (changed) this.#ask();
  }

  stop() {
    this.wanted = false;
  }

  #choose(change) {
    Object.assign(this.choices, change);
    if (change.hardware !== undefined && !change.hardware) this.choices.tp = 1;
    this.#address();
    this.controls.show(this.choices, this.model, this.known);
    this.#ask();
  }

  #address() {
    if (location.hash !== toAddress(this.choices)) history.replaceState(null, "", toAddress(this.choices));
  }

  /** One question is under way at most. What was chosen meanwhile is asked next, and what lies between is skipped. */
  async #ask() {
    this.outdated = true;
    this.results.setAttribute("aria-busy", "true");
    if (this.asking) return;
    this.asking = true;
    while (this.outdated && this.wanted) {
      await new Promise((resolve) => setTimeout(resolve, PAUSE));
      this.outdated = false;
      const shape = this.choices.shape;
      try {
        const answer = await makePlan(toBody(this.choices, this.model));
        if (shape === this.choices.shape) this.#show(answer);
      } catch (error) {
        if (!this.outdated) this.#trouble(error);
      }
    }
    this.asking = false;
    this.results.setAttribute("aria-busy", "false");
  }

  #show({ plan, served }) {
    const { model, hardware } = plan;
    this.known = plan.known;
    const notes = [plan.note, plan.load.context > model.context && `${model.name} was made for ${whole(model.context)} tokens`];
    this.state.textContent = notes.filter(Boolean).join(". ");
    this.state.hidden = !this.state.textContent;
    this.state.classList.remove("wrong");
    this.title.textContent = model.name;
    const devices = hardware.devices > 1 ? `${hardware.devices} × ` : "";
    this.about.textContent = `${inCount(model.parameters)} parameters · ${model.layers} layers · context ${whole(model.context)} · on ${devices}${hardware.name}`;
    this.controls.show(this.choices, this.model, plan.known);
    this.controls.mark(null);
    this.memory.show(plan, this.choices.shape || this.choices.hardware ? null : served);
    this.ceilings.show(plan);
    const open = this.panels.querySelector(".formulas")?.open ?? false;
    const panels = [usersPanel(plan), h(".two", attentionPanel(plan), stepsPanel(plan)), otherEnginesPanel(plan), advicePanel(plan), draftsPanel(plan), formulasPanel(plan, open)];
    this.panels.replaceChildren(...panels.filter(Boolean));
    this.results.hidden = false;
    this.results.classList.remove("stale");
  }

  #trouble(error) {
    this.state.hidden = false;
    if (this.results.hidden) this.about.textContent = "";
    this.state.textContent = error.message;
    this.state.classList.add("wrong");
    this.controls.mark(error.param);
    this.results.classList.add("stale"); // they are of another question
    if (FOR_NOW.has(error.status)) setTimeout(() => this.wanted && this.#ask(), PATIENCE);
  }
}
