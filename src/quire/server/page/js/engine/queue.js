// Who waits, in the order in which they will be taken.

import { h } from "../dom.js";
import { ownerColour } from "./palette.js";
import { inSeconds, whole } from "./units.js";

const SHOWN = 40;

export class Queue {
  constructor() {
    this.list = h("ol");
    this.note = h("span.note");
    this.empty = h("p.empty", "The queue is empty.");
    this.element = h("section.panel.queue", { "aria-label": "Queue" }, h("header", h("h3", "Queue"), this.note), this.empty, this.list);
  }

  show({ snapshot, now, requests }) {
    const waiting = snapshot.sequences.filter((view) => view.state !== "running");
    const { stats } = snapshot;
    this.empty.hidden = waiting.length > 0;
    this.note.textContent = stats.waiting ? `${whole(stats.waiting)} waiting for ${lacking(snapshot, waiting[0])}` : "";
    const items = waiting.slice(0, SHOWN).map((view) => {
      const text = `${whole(view.num_known)} tokens, ${inSeconds(now - view.arrival)}`;
      const dot = h("span.dot");
      dot.style.background = ownerColour(requests.get(view.request_id)?.number ?? 0);
      return h(`li.${view.state}`, { title: view.request_id }, dot, view.state === "preempted" ? `preempted, ${text}` : text);
    });
    if (stats.waiting > items.length) items.push(h("li", `${whole(stats.waiting - items.length)} more`));
    this.list.replaceChildren(...items);
  }
}

/** What the first one lacks. */
export function lacking({ stats, max_num_seqs: rows, block_size: size }, first) {
  if (stats.running >= rows) return "a row";
  const needed = Math.ceil((first?.num_known ?? 0) / size);
  return needed > stats.num_blocks - stats.held_blocks ? "blocks" : "the next step";
}
