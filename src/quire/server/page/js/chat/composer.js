// Where people write.

import { h, icon, iconButton } from "../dom.js";

export class Composer {
  constructor({ onsend, onstop, onedit, onsettings }) {
    this.input = h("textarea", {
      rows: "1",
      placeholder: "Write a message",
      "aria-label": "Message",
      onkeydown: (event) => {
        if (event.key === "ArrowUp" && !this.input.value && onedit()) event.preventDefault();
        if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
        event.preventDefault();
        this.#send(onsend);
      },
      oninput: () => this.#update(),
    });
    this.button = h("button.primary", { type: "submit" });
    this.settings = iconButton("sliders", "Parameters", onsettings, { "aria-controls": "settings", "aria-expanded": "false" });
    this.element = h(
      ".composer",
      h(
        "form",
        {
          onsubmit: (event) => {
            event.preventDefault();
            if (this.busy) onstop();
            else this.#send(onsend);
          },
        },
        this.settings,
        this.input,
        this.button,
      ),
      h("p.hint", h("kbd", "Enter"), " sends, ", h("kbd", "Shift Enter"), " begins a line, ", h("kbd", "Esc"), " stops"),
    );
    this.setBusy(false);
  }

  setBusy(busy) {
    this.busy = busy;
    this.button.setAttribute("aria-label", busy ? "Stop" : "Send");
    this.button.title = busy ? "Stop" : "Send";
    this.button.replaceChildren(icon(busy ? "stop" : "send"));
    this.#update();
  }

  set(text) {
    this.input.value = text;
    this.#update();
    this.input.focus();
  }

  #send(onsend) {
    const text = this.input.value.trim();
    if (!text || this.busy) return;
    this.input.value = "";
    this.#update();
    onsend(text);
  }

  #update() {
    this.button.disabled = !this.busy && !this.input.value.trim();
    if (CSS.supports("field-sizing", "content")) return;
    this.input.style.height = "auto";
    this.input.style.height = `${this.input.scrollHeight}px`;
  }
}
