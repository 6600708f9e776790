// Puts the page together: the masthead, the shelf, the three views, and the address that says which is shown.

import { onKeyWanted } from "./api.js";
import { ChatView } from "./chat/view.js";
import { Shelf } from "./chat/shelf.js";
import { h, icon } from "./dom.js";
import { EngineView } from "./engine/view.js";
import { askForKey } from "./keydialog.js";
import { ModelChoice } from "./models.js";
import { PlanView } from "./plan/view.js";
import { Shortcuts } from "./shortcuts.js";
import { kept } from "./storage.js";
import { Store } from "./store.js";
import { currentTheme, onTheme, toggleTheme } from "./theme.js";

const byId = (id) => document.getElementById(id);
onKeyWanted(askForKey);

const store = new Store(kept);
const models = new ModelChoice(byId("model"), () => route());
const chat = new ChatView(byId("chat-view"), { store, model: () => models.value, onchange: showShelf });
const engine = new EngineView(byId("engine-view"), chat.ours);
const plan = new PlanView(byId("plan-view"));
const shelf = new Shelf(byId("shelf"), {
  onnew: startNew,
  onrename: (id, title) => {
    store.rename(id, title);
    if (chat.chat.id === id) Object.assign(chat.chat, { title: title.trim(), named: Boolean(title.trim()) });
    showShelf();
  },
  ondelete: (id) => {
    chat.writing.get(id)?.controller.abort();
    store.delete(id);
    if (chat.chat.id === id) startNew();
    showShelf();
  },
});

function showShelf() {
  shelf.show(store.list(), chat.chat.id, chat.writing);
  const known = store.list().some((item) => item.id === chat.chat.id);
  if (known && ["", "#chat"].includes(location.hash)) history.replaceState(null, "", `#chat/${chat.chat.id}`);
}

function startNew() {
  chat.open(null);
  if (["", "#chat"].includes(location.hash)) showShelf();
  else location.hash = "#chat";
  openShelf(false);
  chat.composer.input.focus();
}

const TITLES = { chat: "Quire", engine: "Engine · Quire", plan: "Plan · Quire" };

/** #engine, #plan, #plan?<choices>, #chat (the conversation that is open, or a new one) or #chat/<id>. */
function route() {
  const [, view, id, query] = /^#(chat|engine|plan)(?:\/(\w+))?(?:\?(.*))?$/.exec(location.hash) ?? [null, "chat", null];
  for (const name of Object.keys(TITLES)) {
    byId(`${name}-view`).hidden = name !== view;
    if (name === view) byId(`to-${name}`).setAttribute("aria-current", "page");
    else byId(`to-${name}`).removeAttribute("aria-current");
  }
  byId("shelf").hidden = byId("open-shelf").hidden = view !== "chat";
  document.title = TITLES[view];
  if (view === "engine" && listed) engine.start(models.value);
  else engine.stop();
  if (view === "plan" && listed) plan.start(models.value, query);
  else plan.stop();
  if (id && id !== chat.chat.id) models.choose(chat.open(id).model);
  chat.settings.advise(models.advice);
  openShelf(false);
  showShelf();
}

const shelfIsOpen = () => byId("shelf").classList.contains("open"); // where it lies over the page

function openShelf(open) {
  byId("shelf").classList.toggle("open", open);
  byId("open-shelf").setAttribute("aria-expanded", String(open));
}

function toggleShelf() {
  openShelf(!shelfIsOpen());
  (shelfIsOpen() ? byId("shelf").querySelector("button") : byId("open-shelf")).focus();
}

/** What lies over the page goes first. */
function escape() {
  if (shelfIsOpen()) toggleShelf();
  else if (!chat.closeSettings()) chat.stop();
}

/** `step` is 1 for the next older conversation, -1 for the next newer one. */
function leaf(step) {
  const items = store.list();
  const next = items[items.findIndex((item) => item.id === chat.chat.id) + step];
  if (next) location.hash = `#chat/${next.id}`;
}

const shortcuts = new Shortcuts([
  ["Escape", "close what is open, or stop the answer", escape, true],
  ["/", "write a message", () => ((location.hash = "#chat"), chat.composer.input.focus())],
  ["n", "new conversation", startNew],
  ["r", "answer again", () => chat.retry()],
  ["u", "edit what you said last", () => chat.editLast()],
  ["p", "parameters", () => chat.toggleSettings()],
  ["]", "next conversation", () => leaf(1)],
  ["[", "previous conversation", () => leaf(-1)],
  ["c", "chat", () => (location.hash = "#chat")],
  ["e", "engine", () => (location.hash = "#engine")],
  ["l", "plan", () => (location.hash = "#plan")],
  ["t", "light or dark", toggleTheme],
  ["?", "this list", () => shortcuts.show()],
]);

const showTheme = () => byId("theme").replaceChildren(icon(currentTheme() === "dark" ? "sun" : "moon"));
showTheme();
onTheme(showTheme);
byId("theme").addEventListener("click", toggleTheme);
byId("help").append(icon("keys"));
byId("help").addEventListener("click", () => shortcuts.show());
byId("open-shelf").append(icon("menu"));
byId("open-shelf").addEventListener("click", toggleShelf);
byId("main").addEventListener("pointerdown", () => openShelf(false));
addEventListener("storage", showShelf); // another tab has changed something
addEventListener("hashchange", route);

const PATIENCE = 3000; // milliseconds until a server that does not answer is asked again
let asking = null;
let listed = false; // the models, or why they are not

/** The list of models, as often as it takes; what keeps it from coming stands under the masthead. */
async function refresh() {
  clearTimeout(asking);
  try {
    await models.refresh();
    byId("notice").hidden = true;
  } catch (error) {
    const again = h("button", { type: "button", onclick: () => refresh().then(route) }, error.status === 401 ? "Enter a key" : "Try again");
    if (byId("notice").textContent !== error.message + again.textContent) byId("notice").replaceChildren(h("span", error.message), again);
    byId("notice").hidden = false;
    if (!error.status) asking = setTimeout(() => refresh().then(route), PATIENCE);
  }
}

document.addEventListener("visibilitychange", () => document.hidden || refresh()); // models come and go
route();
refresh().finally(() => {
  listed = true;
  route();
});
if (!/^#(engine|plan)/.test(location.hash)) chat.composer.input.focus();
