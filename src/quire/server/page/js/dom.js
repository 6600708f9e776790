// Elements from data. Strings become text nodes: nothing here, or anywhere in the page, parses HTML.

/** h("a.link", {href, onclick}, "text", child, [more]) */
export function h(what, ...rest) {
  const [tag, ...classes] = what.split(".");
  const element = document.createElement(tag || "div");
  if (classes.length) element.className = classes.join(" ");
  const [first] = rest;
  const attributes = first && first.constructor === Object ? rest.shift() : {};
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...rest.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

// 20 x 20, drawn with a line.
const PATHS = {
  menu: "M3 6h14M3 10h14M3 14h9",
  plus: "M10 4v12M4 10h12",
  send: "M10 16V4M5 9l5-5 5 5",
  stop: "M6 6h8v8H6z",
  edit: "M4 16l1-4 8-8 3 3-8 8zM11.5 5.5l3 3",
  retry: "M15.5 9a6 6 0 1 0-.8 4.2M15.7 4.5V9h-4.5",
  copy: "M7 7h9v9H7zM13 7V4H4v9h3",
  done: "M4 10.5l4 4 8-9",
  trash: "M4 6h12M8 6V4h4v2M6 6l.7 10h6.6L14 6",
  save: "M10 3v9M6 8.5l4 4 4-4M4 16h12",
  sliders: "M3 6h7M14 6h3M3 14h3M10 14h7M12 4v4M8 12v4",
  close: "M5 5l10 10M15 5L5 15",
  sun: "M10 6.5a3.5 3.5 0 1 0 0 7 3.5 3.5 0 0 0 0-7zM10 2v2M10 16v2M2 10h2M16 10h2M4.3 4.3l1.4 1.4M14.3 14.3l1.4 1.4M4.3 15.7l1.4-1.4M14.3 5.7l1.4-1.4",
  moon: "M16 11.5A6.5 6.5 0 0 1 8.5 4a6.5 6.5 0 1 0 7.5 7.5z",
  keys: "M3 6h14v9H3zM6 9h.01M9 9h.01M12 9h.01M14.5 9h.01M7 12h6",
  key: "M12.5 3.5a4 4 0 1 1-3 6.7L4 15.7V17h3v-2h2v-2l1.5-1.5M13.5 6.5h.01",
  back: "M12 4l-6 6 6 6",
  forth: "M8 4l6 6-6 6",
};

export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 20 20");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", PATHS[name]);
  svg.append(path);
  return svg;
}

/** A button that is an icon; its name is read out, and shown when the pointer rests. */
export const iconButton = (name, label, onclick, more = {}) =>
  h("button.quiet", { type: "button", "aria-label": label, title: label, onclick, ...more }, icon(name));

const announcer = document.getElementById("announcer");

/** For screen readers. */
export function announce(text) {
  announcer.textContent = text;
}

/** A dialog that closes with Escape, with its button, and by a click beside it. Returns it, shown. */
export function dialog(title, content, onclose) {
  const close = iconButton("close", "Close", () => element.close());
  const heading = h("h2", title);
  const element = h("dialog", { "aria-label": title }, h(".dialog-head", heading, close), content);
  element.addEventListener("click", (event) => event.target === element && element.close());
  element.addEventListener("close", () => {
    element.remove();
    onclose?.();
  });
  document.body.append(element);
  element.showModal();
  return element;
}
