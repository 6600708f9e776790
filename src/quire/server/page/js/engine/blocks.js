// The pool, block by block: whose each one is, which are shared, which still carry a prefix.

import { h } from "../dom.js";
import { Canvas, pointable } from "./canvas.js";
import { colour, ownerColour } from "./palette.js";
import { plural, whole } from "./units.js";
import { CACHED, FIRST_OWNER, FREE } from "./unpack.js";

const TALLEST = 320; // pixels
const CELLS = [14, 12, 10, 8, 7, 6, 5, 4, 3]; // pixels, with the gap
const MIN_BLOCKS = 256; // drawn at least, if there are as many

/** How many blocks are drawn: free blocks at the end of a pool that was never full are left out. */
export function numDrawn(owners, before = 0) {
  const last = owners.findLastIndex((owner) => owner !== FREE);
  return Math.min(owners.length, Math.max(before, MIN_BLOCKS, 2 ** Math.ceil(Math.log2(last + 1 || 1))));
}

/** {cell, columns, each, rows}: the largest cells for which `count` blocks fit; where none do, a cell stands for `each` blocks. */
export function layout(count, width) {
  for (const cell of CELLS) {
    const columns = Math.max(Math.floor(width / cell), 1);
    const rows = Math.ceil(count / columns);
    if (rows * cell <= TALLEST) return { cell, columns, rows, each: 1 };
  }
  const cell = CELLS.at(-1);
  const columns = Math.max(Math.floor(width / cell), 1);
  const each = Math.ceil(count / (columns * Math.floor(TALLEST / cell)));
  return { cell, columns, rows: Math.ceil(count / each / columns), each };
}

export class BlockMap {
  at = null; // the first block of the cell that is pointed at

  constructor() {
    this.canvas = new Canvas((width) => this.#layout(width).rows * this.#layout(width).cell, "Map of blocks");
    this.note = h("span.note");
    this.rest = h("span");
    this.pointed = h("span.pointed", { "aria-live": "polite" });
    const { element } = this.canvas;
    pointable(element, {
      find: (event) => this.#blockAt(event),
      move: (key) => this.#moved(key),
      point: (block) => this.#point(block),
    });
    const key = (name, text) => h("span.key", h(`span.swatch.${name}`), text);
    this.element = h(
      "section.panel.blocks",
      { "aria-label": "Blocks" },
      h("header", h("h3", "Blocks"), this.note),
      element,
      h(
        ".legend",
        key("free", "free"),
        key("cached", "free, with a cached prefix"),
        key("owned", "held: each request has a colour"),
        key("owned.shared", "held by several"),
        this.rest,
        this.pointed,
      ),
    );
  }

  show(history, blocks) {
    Object.assign(this, { history, blocks });
    const { stats, block_size: size } = history.snapshot;
    const count = blocks.owners.length;
    const shared = blocks.refs.reduce((sum, refs) => sum + (refs > 1), 0);
    this.drawn = numDrawn(blocks.owners, this.drawn);
    this.note.textContent =
      `${plural(stats.num_blocks, "block")} of ${size} tokens · ${whole(stats.held_blocks)} held` +
      `${shared ? `, ${whole(shared)} of them shared` : ""} · ${whole(stats.cached_blocks)} cached`;
    this.rest.textContent = this.drawn < count ? `not drawn: ${whole(count - this.drawn)} more, all free` : "";
    this.canvas.describe(`Map of blocks: ${this.note.textContent}. Arrow keys go from block to block.`);
    this.draw();
  }

  #layout(width) {
    return layout(this.drawn ?? 0, width);
  }

  draw() {
    const surface = this.blocks && this.canvas.begin();
    if (!surface) return;
    const { context, width } = surface;
    const { cell, columns, each } = this.#layout(width);
    const colours = this.history.snapshot.sequences.map((view) => ownerColour(this.history.requests.get(view.request_id)?.number ?? 0));
    const [free, cached, paper] = [colour("block-free"), colour("block-cached"), colour("paper")];
    const side = cell - 1;
    const hole = Math.max(1, Math.round(side * 0.4));
    let fill = null;
    for (let block = 0, at = 0; block < this.drawn; block += each, at++) {
      const { owner, shared } = this.#cell(block, each);
      const next = owner === FREE ? free : owner === CACHED ? cached : colours[owner - FIRST_OWNER];
      if (next !== fill) context.fillStyle = fill = next;
      const x = (at % columns) * cell;
      const y = Math.floor(at / columns) * cell;
      context.fillRect(x, y, side, side);
      if (shared) {
        context.fillStyle = fill = paper;
        context.fillRect(x + (side - hole) / 2, y + (side - hole) / 2, hole, hole);
      }
    }
    if (this.at === null) return;
    const at = Math.floor(this.at / each);
    context.strokeStyle = colour("ink");
    context.lineWidth = 1.5;
    context.strokeRect((at % columns) * cell - 0.5, Math.floor(at / columns) * cell - 0.5, side + 1, side + 1);
  }

  /** What a cell shows: an owner, if any of its blocks is held. */
  #cell(block, each) {
    const { owners, refs } = this.blocks;
    if (each === 1) return { owner: owners[block], shared: refs[block] > 1 };
    let owner = FREE;
    let shared = false;
    for (let i = block; i < Math.min(block + each, this.drawn); i++) {
      if (owner < FIRST_OWNER && owners[i] > owner) owner = owners[i];
      shared ||= refs[i] > 1;
    }
    return { owner, shared };
  }

  // ---- one cell, pointed at

  #blockAt({ offsetX, offsetY }) {
    const { cell, columns, each } = this.#layout(this.canvas.element.clientWidth);
    const block = (Math.floor(offsetY / cell) * columns + Math.floor(offsetX / cell)) * each;
    return offsetX < columns * cell && block < this.drawn ? block : null;
  }

  #moved(key) {
    const { columns, each } = this.#layout(this.canvas.element.clientWidth);
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns, Home: -Infinity, End: Infinity }[key];
    if (step === undefined || !this.blocks) return undefined;
    if (this.at === null) return 0;
    const last = Math.floor((this.drawn - 1) / each) * each;
    return Math.min(Math.max(this.at + step * each, 0), last);
  }

  #point(block) {
    this.at = block;
    this.pointed.textContent = block === null || !this.blocks ? "" : this.#words(block);
    this.draw();
  }

  #words(block) {
    const { each } = this.#layout(this.canvas.element.clientWidth);
    if (each === 1) return `block ${whole(block)}: ${this.#state(block)}`;
    const all = [...this.blocks.owners.slice(block, Math.min(block + each, this.drawn))];
    const cached = all.filter((owner) => owner === CACHED).length;
    const held = all.filter((owner) => owner >= FIRST_OWNER).length;
    return `blocks ${whole(block)} to ${whole(block + all.length - 1)}: ${held} held, ${cached} cached`;
  }

  #state(block) {
    const owner = this.blocks.owners[block];
    if (owner === FREE) return "free";
    if (owner === CACHED) return "free, with a prefix";
    const refs = this.blocks.refs[block];
    const view = this.history.snapshot.sequences[owner - FIRST_OWNER];
    return refs > 1 ? `${view.request_id} and ${plural(refs - 1, "other")}` : view.request_id;
  }
}
