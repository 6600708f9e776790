// Asks for the key of a server that wants one.

import { h, dialog } from "./dom.js";
import { savedKey, saveKey } from "./api.js";

let open = null; // several requests may meet the same locked door

export function askForKey(reason) {
  open ??= new Promise((resolve) => {
    const input = h("input", { type: "password", autocomplete: "off", "aria-label": "API key", value: savedKey() });
    let given = false;
    const form = h(
      "form",
      {
        onsubmit: (event) => {
          event.preventDefault();
          saveKey(input.value.trim());
          given = true;
          box.close();
        },
      },
      h("p", reason ? `The server asks for a key: ${reason}.` : "The key that this page sends to the server."),
      h("p.note", "It is kept in this browser, and sent to this server only."),
      input,
      h(".dialog-buttons", h("button.primary", "Use this key")),
    );
    const box = dialog("API key", form, () => {
      open = null;
      resolve(given);
    });
    box.classList.add("key-dialog");
    input.focus();
  });
  return open;
}
