// Colours for canvases: named ones from the style sheet, and one of its own for each request.

import { currentTheme, onTheme } from "../theme.js";

let resolved = new Map();
onTheme(() => (resolved = new Map()));

const probe = document.createElement("span");
document.body.append(probe);

/** What `--name` is in the theme that is shown. */
export function colour(name) {
  if (!resolved.has(name)) {
    probe.style.color = `var(--${name})`;
    resolved.set(name, getComputedStyle(probe).color);
  }
  return resolved.get(name);
}

const GOLDEN = 137.508; // degrees: neighbours in time are far apart in colour, however many there are

export function ownerColour(number, alpha = 1) {
  const [light, chroma] = currentTheme() === "dark" ? [0.74, 0.11] : [0.62, 0.125];
  return `oklch(${light} ${chroma} ${((28 + number * GOLDEN) % 360).toFixed(1)} / ${alpha})`;
}
