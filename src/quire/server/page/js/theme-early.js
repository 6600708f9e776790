// Runs before anything is drawn: a chosen theme must not flash in the other one first.
try {
  const chosen = localStorage.getItem("quire.theme");
  if (chosen) document.documentElement.dataset.theme = chosen;
} catch {
  // storage is forbidden: the system's theme it is
}
