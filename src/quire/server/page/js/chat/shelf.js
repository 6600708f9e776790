// The list of conversations.

import { h, icon, iconButton, dialog } from "../dom.js";

const MANY = 8; // conversations, from which on they are looked for

export class Shelf {
  constructor(element, { onnew, onrename, ondelete }) {
    this.element = element;
    this.onrename = onrename;
    this.ondelete = ondelete;
    this.list = h("ol");
    this.search = h("input", { type: "search", placeholder: "Find by title", "aria-label": "Find a conversation by its title", oninput: () => this.#filter() });
    this.empty = h("p.label", "Nothing yet");
    element.append(
      h("button.new", { type: "button", onclick: onnew }, icon("plus"), "New conversation"),
      this.empty,
      this.search,
      this.list,
      h("footer", "Kept in this browser only."),
    );
  }

  /** `items` as Store.list() has them; `writing` are the ids of those that are being answered. */
  show(items, current, writing) {
    this.empty.hidden = items.length > 0;
    this.search.hidden = items.length < MANY;
    this.list.replaceChildren(
      ...items.map((item) => {
        const title = item.title || "Untitled";
        const here = item.id === current;
        const line = h(
          "li",
          h("a", { href: `#chat/${item.id}`, title, "aria-current": here && "page" }, title),
          h(
            ".tools",
            iconButton("edit", `Rename ${title}`, () => this.#rename(line, item)),
            iconButton("trash", `Delete ${title}`, () => this.#confirm(item, title)),
          ),
        );
        line.classList.toggle("current", here);
        line.classList.toggle("writing", writing.has(item.id));
        return line;
      }),
    );
    this.#filter();
  }

  #filter() {
    const wanted = this.search.hidden ? "" : this.search.value.trim().toLowerCase();
    for (const line of this.list.children) line.hidden = !line.textContent.toLowerCase().includes(wanted);
  }

  #rename(line, item) {
    const input = h("input", { value: item.title, "aria-label": "Title" });
    let open = true;
    const finish = (keep) => {
      if (!open) return;
      open = false;
      this.onrename(item.id, keep ? input.value : item.title);
    };
    input.addEventListener("keydown", (event) => {
      if (event.key === "Enter") finish(true);
      if (event.key === "Escape") finish(false);
      event.stopPropagation();
    });
    input.addEventListener("blur", () => finish(true));
    line.replaceChildren(input);
    input.select();
  }

  #confirm(item, title) {
    const remove = h("button.primary", { type: "button" }, "Delete");
    const keep = h("button", { type: "button" }, "Keep");
    const box = dialog("Delete this conversation?", h("div", h("p", `“${title}” will be gone for good.`), h(".dialog-buttons", keep, remove)));
    keep.addEventListener("click", () => box.close());
    remove.addEventListener("click", () => {
      box.close();
      this.ondelete(item.id);
    });
    keep.focus();
  }
}
