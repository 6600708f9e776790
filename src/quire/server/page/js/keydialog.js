// Asks for the key of a server that wants one.

import { h, dialog } from "./dom.js";
import { keyIsKept, savedKey, saveKey } from "./api.js";

let open = null; // several requests may meet the same locked door

/** Resolves to whether a key was given. */
export function askForKey(reason) {
  open ??= new Promise((resolve) => {
    const input = h("input", { type: "password", autocomplete: "off", required: true, value: savedKey() });
    const keep = h("input", { type: "checkbox", name: "keep" });
    keep.checked = keyIsKept();
    let given = false;
    const form = h(
      "form",
      {
        onsubmit: (event) => {
          event.preventDefault();
          saveKey(input.value.trim(), keep.checked);
          given = true;
          box.close();
        },
      },
      h("p", reason ?? "The key that this page sends to its server, and nowhere else."),
      h("label.field", "API key", input),
      h("label.check", keep, h("span", "Keep it in this browser")),
      h("p.note", "Otherwise it is forgotten when this tab is closed."),
      h(".dialog-buttons", savedKey() && h("button", { type: "button", onclick: forget }, "Forget it"), h("button.primary", "Use this key")),
    );
    function forget() {
      saveKey("");
      box.close();
    }
    const box = dialog("API key", form, () => {
      open = null;
      resolve(given);
    });
    input.focus();
  });
  return open;
}
