// Light or dark: as the system has it until the user chooses.

import { kept } from "./storage.js";

const dark = matchMedia("(prefers-color-scheme: dark)");
const root = document.documentElement;
const listeners = new Set();

export const currentTheme = () => root.dataset.theme ?? (dark.matches ? "dark" : "light");

export function toggleTheme() {
  const next = currentTheme() === "dark" ? "light" : "dark";
  root.dataset.theme = next;
  kept.setItem("quire.theme", next);
  for (const listener of listeners) listener();
}

/** Canvases have no style sheet: they draw again. */
export const onTheme = (listener) => listeners.add(listener);

dark.addEventListener("change", () => {
  for (const listener of listeners) listener();
});
