// A canvas that is sharp on every screen, and knows its size in the page's pixels.

import { h } from "../dom.js";

export class Canvas {
  /** `height(width)` in pixels; `label` is what a screen reader says of it. */
  constructor(height, label) {
    this.height = height;
    this.element = h("canvas", { role: "img", "aria-label": label });
    this.context = this.element.getContext("2d");
  }

  describe(text) {
    this.element.setAttribute("aria-label", text);
  }

  /** Cleared and ready: {context, width, height}; null while it is not shown. */
  begin() {
    const width = this.element.clientWidth;
    if (!width) return null;
    const height = this.height(width);
    const scale = devicePixelRatio;
    const size = [Math.round(width * scale), Math.round(height * scale)];
    if (this.element.width !== size[0] || this.element.height !== size[1]) {
      [this.element.width, this.element.height] = size;
      this.element.style.height = `${height}px`;
    }
    this.context.setTransform(scale, 0, 0, scale, 0, 0);
    this.context.clearRect(0, 0, width, height);
    return { context: this.context, width, height };
  }
}

/** Things on a canvas that can be pointed at, with the pointer or with keys.
 *  `find(event)` is what is under the pointer, `move(key)` where a key leads (undefined: nowhere), `point(thing | null)` shows it. */
export function pointable(element, { find, move, point }) {
  element.tabIndex = 0;
  element.setAttribute("role", "application"); // so that screen readers leave the arrow keys to it
  element.addEventListener("pointermove", (event) => point(find(event)));
  element.addEventListener("pointerleave", () => point(null));
  element.addEventListener("blur", () => point(null));
  element.addEventListener("keydown", (event) => {
    if (event.key === "Escape") return point(null);
    const thing = move(event.key);
    if (thing === undefined) return;
    event.preventDefault();
    point(thing);
  });
}
