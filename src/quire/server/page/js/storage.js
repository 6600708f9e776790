// Where the page keeps things: in the browser, in the tab, or, where both are forbidden, as long as the page is open.

class Memory {
  #items = new Map();
  getItem = (name) => this.#items.get(name) ?? null;
  setItem = (name, value) => void this.#items.set(name, value);
  removeItem = (name) => void this.#items.delete(name);
}

function open(storage) {
  try {
    storage().getItem("quire");
    return storage();
  } catch {
    return new Memory();
  }
}

export const kept = open(() => localStorage);
export const untilClosed = open(() => sessionStorage);
