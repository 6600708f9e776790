// The tree that markdown.js makes, as elements. While a text grows, blocks that have not changed stay as they are.

import { tokens } from "./code.js";
import { h, icon, announce } from "./dom.js";
import { parse } from "./markdown.js";

export class Prose {
  #raw = [];

  constructor() {
    this.element = h(".prose");
  }

  set(text) {
    const blocks = parse(text);
    let same = 0;
    while (same < blocks.length && same < this.#raw.length && blocks[same].raw === this.#raw[same]) same += 1;
    while (this.element.childNodes.length > same) this.element.lastChild.remove();
    this.element.append(...blocks.slice(same).map(block));
    this.#raw = blocks.map((one) => one.raw);
  }
}

function block(node) {
  switch (node.type) {
    case "heading":
      return h(`h${Math.min(node.level + 2, 6)}`, inlines(node.children)); // the page has its own h1 and h2
    case "code":
      return codeBlock(node);
    case "quote":
      return h("blockquote", node.children.map(block));
    case "list":
      return h(
        node.ordered ? "ol" : "ul",
        node.ordered && node.start !== 1 ? { start: String(node.start) } : {},
        node.items.map((item) => h("li", item.map((one) => (node.loose ? block(one) : tight(one))))),
      );
    case "table":
      return table(node);
    case "rule":
      return h("hr");
    default:
      return h("p", inlines(node.children));
  }
}

/** In a list without blank lines, a paragraph is just its text. */
const tight = (node) => (node.type === "paragraph" ? h("span", inlines(node.children)) : block(node));

function codeBlock({ language, text }) {
  const label = h("span", "Copy");
  const button = h(
    "button.copy",
    {
      type: "button",
      "aria-label": `Copy this ${language || "code"} block`,
      onclick: async () => {
        await copyText(text);
        label.textContent = "Copied";
        announce("Copied");
        setTimeout(() => (label.textContent = "Copy"), 1500);
      },
    },
    icon("copy"),
    label,
  );
  const parts = tokens(text, language).map((part) => (part.kind ? h(`span.${part.kind}`, part.text) : part.text));
  return h("figure.code", h("figcaption", h("span", language || "text"), button), h("pre", { tabindex: "0" }, h("code", parts)));
}

function table({ head, rows, align }) {
  const cell = (kind) => (children, column) => h(`${kind}.${align[column] ?? "start"}`, inlines(children));
  return h(
    ".table",
    { tabindex: "0", role: "region", "aria-label": "Table" },
    h("table", h("thead", h("tr", head.map(cell("th")))), h("tbody", rows.map((row) => h("tr", row.map(cell("td")))))),
  );
}

const inlines = (nodes) => nodes.map(inline);

function inline(node) {
  if (typeof node === "string") return node;
  switch (node.type) {
    case "code":
      return h("code", node.text);
    case "link":
      return h("a", { href: node.href, target: "_blank", rel: "noopener noreferrer" }, inlines(node.children));
    case "break":
      return h("br");
    case "strike":
      return h("s", inlines(node.children));
    default:
      return h(node.type, inlines(node.children)); // strong, em
  }
}

/** Also where the clipboard is closed to pages that did not come over TLS. */
export async function copyText(text) {
  if (navigator.clipboard && isSecureContext) return navigator.clipboard.writeText(text);
  const area = h("textarea.hidden", { value: text, "aria-hidden": "true" });
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}
