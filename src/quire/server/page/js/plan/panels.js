// What a plan says beside memory: speed, users, kinds of attention, cost, draft tokens, advice, formulas.

import { h } from "../dom.js";
import { Figure } from "../engine/figures.js";
import { inSeconds, seconds, whole } from "../engine/units.js";
import { binary, dollars, inBinary } from "./units.js";

const panel = (name, title, note, ...content) =>
  h(`section.panel.${name}`, { "aria-label": title }, h("header", h("h3", title), note && h("span.note", note)), content);

const BOUND = { memory: "bound by memory", compute: "bound by compute", links: "bound by links" };

export class Ceilings {
  constructor() {
    this.first = new Figure("First token");
    this.next = new Figure("Between tokens");
    this.rate = new Figure("Tokens per second");
    this.token = new Figure("KV of a token");
    this.cost = new Figure("Cost per million");
    this.element = h("dl.figures", [this.first, this.next, this.rate, this.token, this.cost].map((figure) => figure.element));
  }

  show({ ttft_seconds: ttft, tpot_seconds: tpot, tokens_per_second: rate, prefill, decode, load, kv, cost }) {
    const atLoad = decode?.find((step) => step.sequences === load.users);
    this.first.set(...seconds(ttft), [prefill && `${whole(load.prompt)} tokens, alone`, prefill && BOUND[prefill.bound]]);
    this.next.set(...seconds(tpot), [atLoad && `${whole(load.users)} at once`, atLoad && BOUND[atLoad.bound]]);
    this.rate.set(rate ? short(rate) : "–", "", [rate && `${short(rate / load.users)} for each user`, rate && "output, at best"]);
    const [size, unit] = binary(kv.bytes_per_token);
    this.token.set(size, unit, [kv.attention, kv.dtype]);
    const price = cost?.per_hour ? cost : null;
    this.cost.set(price ? dollars(price.per_million_output_tokens) : "–", "", price ? ["output tokens", `prompts ${dollars(price.per_million_prompt_tokens)}`, `${dollars(price.per_day)} a day${cost.source ? ", a typical price" : ""}`] : [cost && "give a price"]);
    this.cost.element.title = cost?.source ?? "";
  }
}

const short = (value) => (value < 10 ? value.toFixed(1) : whole(value));

/** How many users of which context fit. */
export function usersPanel({ kv, load }) {
  const cells = Object.entries(kv.users_by_context).map(([context, users]) =>
    h(users < load.users ? "div.few" : "div", h("dt.label", `${whole(Number(context))}`), h("dd", whole(users))),
  );
  return panel("fits", "Users that fit", "by the tokens that each may have", h("dl", cells));
}

/** The KV cache of the same layers with other kinds of attention. */
export function attentionPanel({ kv }) {
  const most = Math.max(...Object.values(kv.variants));
  const rows = Object.entries(kv.variants).map(([name, size]) => {
    const bar = h(name === kv.attention ? "span.amount.own" : "span.amount");
    bar.style.width = `${(100 * size) / most}%`;
    return h("tr", h("th", { scope: "row" }, name), h("td.wide", bar), h("td", inBinary(size)), h("td", name === kv.attention ? "this model" : `${(size / kv.bytes_per_token).toPrecision(2)}×`));
  });
  return panel("attention", "Kinds of attention", "KV cache of a token, the same layers", h("table", h("tbody", rows)));
}

/** The roofline of each step. */
export function stepsPanel({ prefill, decode, load }) {
  if (!decode) return null;
  const head = h("tr", ["step", "op/byte", "bound by", "time", "tokens/s"].map((name) => h("th", { scope: "col" }, name)));
  const row = (name, step, own) =>
    h(own ? "tr.own" : "tr", h("th", { scope: "row" }, name), [whole(step.intensity), step.bound, inSeconds(step.seconds), short(step.tokens_per_second)].map((text) => h("td", text)));
  const rows = decode.map((step) => row(`decode ${whole(step.sequences)}`, step, step.sequences === load.users));
  return panel("roofline", "Steps", "ceilings: no engine is faster", h("table", h("thead", head), h("tbody", row(`prefill ${whole(prefill.new_tokens)}`, prefill, true), rows)));
}

/** How many times as fast with draft tokens, by how many there are and how many of them are accepted. */
export function draftsPanel({ speculation }) {
  if (!speculation) return null;
  const rows = Object.entries(speculation.speedup);
  const counts = Object.keys(rows[0][1]);
  const head = h("tr", ["accepted", ...counts].map((name) => h("th", { scope: "col" }, name)));
  const cell = (gain) => h(gain > 1 ? "td.pays" : "td", gain.toFixed(2));
  const body = rows.map(([share, gains]) => h("tr", h("th", { scope: "row" }, `${Math.round(100 * share)} %`), counts.map((count) => cell(gains[count]))));
  const note = `times as fast, by drafts in a step; one costs ${(100 * speculation.draft_cost).toPrecision(2)} % of it`;
  return panel("drafts", "When draft tokens pay", note, h("table", h("thead", head), h("tbody", body)));
}

export function otherEnginesPanel({ other_engines: sentences }) {
  return sentences?.length ? panel("others", "Another engine", "", h("ul", sentences.map((text) => h("li", text)))) : null;
}

export function advicePanel({ advice, note }) {
  if (!advice.length) return null;
  const items = advice.map(({ what, flags, why, gain }) =>
    h("li", h(gain === null ? "span.gain.needed" : "span.gain", gain === null ? "needed" : gain > 1 ? `${gain.toFixed(2)}×` : "–"), h("div", h("strong", what), " ", h("code", flags), h("p", why))),
  );
  return panel("advice", "Worth trying", note ? "" : "best first, with the gain that ceilings predict", h("ol", items));
}

export function formulasPanel({ explain }, open) {
  const rows = explain.map((line) => {
    const [, name, formula] = /^([^=]*?)\s*=\s*(.*)$/.exec(line) ?? [null, "", line];
    return [h("dt", name), h("dd", formula)];
  });
  return h("section.panel", h("details.formulas", { open }, h("summary", "The formulas, with their numbers"), h("dl", rows)));
}
