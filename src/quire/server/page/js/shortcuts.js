// Keyboard shortcuts. Single letters work outside of text fields, and can be turned off: speech input and tremor press them too.

import { h, dialog } from "./dom.js";
import { kept } from "./storage.js";

const LETTERS = "quire.letters";
const typing = (target) => target.closest("input, textarea, select, [contenteditable]") !== null;
const lettersAreKeys = () => kept.getItem(LETTERS) !== "off";

export class Shortcuts {
  /** `keys`: [key, what it does, action, also while typing?] */
  constructor(keys) {
    this.keys = keys;
    addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing || document.querySelector("dialog[open]")) return;
      const shortcut = keys.find(([key]) => key === event.key);
      if (!shortcut || (typing(event.target) && !shortcut[3])) return;
      if (event.key.length === 1 && !lettersAreKeys()) return;
      event.preventDefault();
      shortcut[2]();
    });
  }

  show() {
    const more = [
      ["Enter", "send the message"],
      ["Shift Enter", "begin a line"],
      ["ArrowUp", "in an empty message: edit what you said last"],
    ];
    const named = { Escape: "Esc", ArrowUp: "↑" };
    const letters = h("input", { type: "checkbox", onchange: () => kept.setItem(LETTERS, letters.checked ? "on" : "off") });
    letters.checked = lettersAreKeys();
    dialog(
      "Keyboard",
      h(
        "div",
        h("dl.shortcuts", [...more, ...this.keys].map(([key, does]) => [h("dt", h("kbd", named[key] ?? key)), h("dd", does)])),
        h("label.check", letters, h("span", "Single letters and signs are shortcuts")),
      ),
    );
  }
}
