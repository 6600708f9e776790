// The map of blocks on its way here: base64 of zlib of bytes.

async function inflate(base64) {
  const packed = Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

export const FREE = 0;
export const CACHED = 1;
export const FIRST_OWNER = 2;

/** {owners, refs}: for each block FREE, CACHED or FIRST_OWNER + an index of `sequences`; and how many hold it. */
export async function unpackBlocks({ owners, refs }) {
  const [pairs, counts] = await Promise.all([inflate(owners), inflate(refs)]);
  const numbers = Uint16Array.from({ length: pairs.length / 2 }, (_, i) => pairs[2 * i] | (pairs[2 * i + 1] << 8));
  return { owners: numbers, refs: counts };
}
