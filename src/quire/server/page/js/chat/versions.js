// What was asked or answered again, in its earlier versions. The message from which on they differ has `versions`:
// {at, tails}. A tail is that message and all that followed; in the place of the one that is shown stands null.

/** Cut `messages` off before `index`, so that another version can begin there. What the first message of it has to
 *  have as `versions`. An answer that never came is not worth keeping. */
export function setAside(messages, index) {
  const [versions, tail] = cut(messages, index);
  if (tail[0].role === "assistant" && !tail[0].content) return versions;
  versions.tails[versions.at] = tail;
  versions.at = versions.tails.push(null) - 1;
  return versions;
}

/** Show the version before (-1) or after (1) the one that begins at `index`. Whether there is one. */
export function turn(messages, index, step) {
  const to = messages[index].versions.at + step;
  if (!messages[index].versions.tails[to]) return false;
  const [versions, tail] = cut(messages, index);
  versions.tails[versions.at] = tail;
  messages.push(...versions.tails[to]);
  messages[index].versions = Object.assign(versions, { at: to });
  versions.tails[to] = null;
  return true;
}

function cut(messages, index) {
  const tail = messages.splice(index);
  const { versions = { at: 0, tails: [null] } } = tail[0];
  delete tail[0].versions;
  return [versions, tail];
}
