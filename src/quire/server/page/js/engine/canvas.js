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
