// Sliders that go by ratios: each stop is a power of two, or half way to the next.

const between = (first, last) => {
  const stops = [];
  for (let stop = first; stop <= last; stop *= 2) stops.push(stop, ...(stop > 1 && stop < last ? [stop * 1.5] : []));
  return stops;
};

export const CONTEXTS = between(512, 131072);
export const USERS = between(1, 512);

/** The stop nearest to a value, by ratio. */
export const nearestStop = (stops, value) =>
  stops.reduce((best, stop, i) => (Math.abs(Math.log(stop / value)) < Math.abs(Math.log(stops[best] / value)) ? i : best), 0);
