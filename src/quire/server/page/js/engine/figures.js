// The numbers that sum it up.

import { h } from "../dom.js";
import { Canvas } from "./canvas.js";
import { colour } from "./palette.js";
import { bytes, inBytes, inSeconds, percent, plural, seconds, whole } from "./units.js";

export class Figures {
  constructor() {
    this.rate = new Figure("Tokens per second", true);
    this.first = new Figure("First token");
    this.next = new Figure("Between tokens");
    this.batch = new Figure("Running");
    this.hits = new Figure("Prefix hits");
    this.memory = new Figure("Cache held");
    const all = [this.rate, this.first, this.next, this.batch, this.hits, this.memory];
    this.element = h("dl.figures", all.map((figure) => figure.element));
  }

  show(event, history) {
    const { latency, memory, restarts } = event;
    const now = history.rates.at(-1);
    this.rate.set(now.generation < 10 && now.generation > 0 ? now.generation.toFixed(1) : whole(now.generation), "", [`prompts: ${whole(now.prefill)} a second`]);
    this.rate.line(history.rates.map((rate) => rate.generation));
    this.#latency(this.first, latency.first_token, "request");
    this.#latency(this.next, latency.next_token, "token");
    if (!history.snapshot) return;
    const { stats, max_num_seqs: rows, resident_bytes: resident, block_size: size } = history.snapshot;
    const trouble = [stats.preemptions && plural(stats.preemptions, "preemption"), restarts && plural(restarts, "restart")].filter(Boolean);
    this.batch.set(whole(stats.running), `of ${whole(rows)}`, [`${whole(stats.waiting)} waiting`, ...trouble]);
    const hits = stats.prefix_queries ? `${whole(stats.prefix_hits)} of ${whole(stats.prefix_queries)}` : "none yet";
    const tiers = Object.entries(stats.tiers ?? {}).map(([tier, of]) => [
      `${whole(of.hits)} from ${tier}, ${inSeconds(of.seconds_saved)} saved, ${inBytes(of.stored_bytes)} kept`,
      of.errors && plural(of.errors, "error"),
    ].filter(Boolean).join(", "));
    this.hits.set(percent(stats.prefix_hits, stats.prefix_queries), stats.prefix_queries ? "%" : "", [hits, "prompt tokens", ...tiers]);
    const perBlock = memory.cache / stats.num_blocks;
    const [value, unit] = bytes(stats.held_blocks * perBlock);
    this.memory.set(value, `${unit} of ${inBytes(memory.cache)}`, [
      stats.held_slots && `${percent(stats.held_slots - stats.used_slots, stats.held_slots)} % of it empty`,
      `weights ${inBytes(memory.weights)}`,
      resident && `process ${inBytes(resident)}`,
    ]);
    this.memory.element.title = `a block is ${inBytes(perBlock)}, ${size} tokens`;
  }

  #latency(figure, { p50, p90, p99, count }, noun) {
    const [value, unit] = seconds(p50);
    const lines = count ? [`90 % within ${inSeconds(p90)}`, `99 % within ${inSeconds(p99)}`, `last ${plural(count, noun)}`] : ["none yet"];
    figure.set(value, count ? `${unit} median` : "", lines);
  }
}

export class Figure {
  constructor(name, withLine = false) {
    this.value = h("span.value", "–");
    this.unit = h("span.unit");
    this.more = h(".more");
    if (withLine) this.canvas = new Canvas(() => 24, "");
    this.element = h(".figure", h("dt.label", name), h("dd", this.value, this.unit, this.canvas?.element, this.more));
    this.canvas?.element.setAttribute("aria-hidden", "true");
  }

  set(value, unit, lines) {
    this.value.textContent = value;
    this.unit.textContent = unit;
    this.more.replaceChildren(...lines.filter(Boolean).map((line) => h("div", line)));
  }

  line(values) {
    const surface = this.canvas.begin();
    if (!surface || values.length < 2) return;
    const { context, width, height } = surface;
    const most = Math.max(1, ...values);
    context.strokeStyle = colour("accent");
    context.lineWidth = 1.5;
    context.lineJoin = "round";
    context.beginPath();
    values.forEach((value, i) => context.lineTo((i / (values.length - 1)) * width, height - 2 - (value / most) * (height - 4)));
    context.stroke();
  }
}
