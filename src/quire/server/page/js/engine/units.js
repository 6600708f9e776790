// Numbers as people read them.

export const whole = (value) => Math.round(value).toLocaleString("en");

/** [figure, unit] */
export function seconds(value) {
  if (value === null || value === undefined) return ["–", ""];
  if (value < 0.01) return [(value * 1000).toFixed(1), "ms"];
  if (value < 1) return [(value * 1000).toFixed(0), "ms"];
  return [value.toFixed(value < 10 ? 2 : 1), "s"];
}

export const inSeconds = (value) => seconds(value).join(" ").trim();

export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return [value >= 100 || unit === 0 ? value.toFixed(0) : value.toFixed(1), units[unit]];
}

export const inBytes = (value) => bytes(value).join(" ");

export const percent = (part, all) => (all ? `${Math.round((100 * part) / all)}` : "–");

export const plural = (count, noun) => `${whole(count)} ${noun}${count === 1 ? "" : "s"}`;
