// Sizes in powers of 1,024, as `quire plan` prints them; money.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

/** [figure, unit] */
export function binary(value) {
  let unit = 0;
  while (value >= 1000 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return [unit === 0 || value >= 100 ? value.toFixed(0) : value.toFixed(value < 10 ? 2 : 1), UNITS[unit]];
}

export const inBinary = (value) => binary(value).join(" ");

export const dollars = (value) => `$${value < 1 ? value.toPrecision(2) : value.toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 })}`;

/** 134515008 -> "135 M" */
export const inCount = (value) => (value >= 1e9 ? `${(value / 1e9).toPrecision(3)} B` : `${Math.round(value / 1e6)} M`);
