// Keys. Single letters work where nobody is typing.

import { h, dialog } from "./dom.js";

const typing = (target) => target.closest("input, textarea, select, [contenteditable]") !== null;

export class Shortcuts {
  /** `keys`: [key, what it does, action, also while typing?] */
  constructor(keys) {
    this.keys = keys;
    addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing || document.querySelector("dialog[open]")) return;
      const found = keys.find(([key]) => key === event.key);
      if (!found || (typing(event.target) && !found[3])) return;
      event.preventDefault();
      found[2]();
    });
  }

  show() {
    const more = [
      ["Enter", "send the message"],
      ["Shift Enter", "begin a line"],
    ];
    const named = { Escape: "Esc" };
    dialog(
      "Keyboard",
      h("dl.shortcuts", [...more, ...this.keys].map(([key, does]) => [h("dt", h("kbd", named[key] ?? key)), h("dd", does)])),
    );
  }
}
