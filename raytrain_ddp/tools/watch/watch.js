// Asks for the content again and again, and replaces the parts of it that have changed.
const main = document.querySelector("main"), live = document.querySelector("#live");
const EVERY_MS = 2000;
const chosen = new Set(), sources = new WeakMap();
let wanted = "";

function ages() {
  for (const time of main.querySelectorAll("time")) {
    const s = Math.max(0, (Date.now() - Date.parse(time.dateTime)) / 1000);
    const [n, unit] = s < 90 ? [s, "s"] : s < 5400 ? [s / 60, "min"] : s < 129600 ? [s / 3600, "h"] : [s / 86400, "d"];
    time.title ||= time.textContent;
    time.textContent = `${Math.round(n)} ${unit} ago`;
  }
}

function restore() {
  for (const box of main.querySelectorAll("input[type=checkbox]")) box.checked = chosen.has(box.value);
  for (const row of main.querySelectorAll("table.watch tbody tr")) {
    row.hidden = !row.querySelector("a").textContent.toLowerCase().includes(wanted);
  }
  const filter = main.querySelector("#filter");
  if (filter && filter.value !== wanted) filter.value = wanted;
  ages();
}

// Replaces an element's children where they differ; what is open, ticked or typed stays so.
function renew(old, made) {
  const before = [...old.children], after = [...made.children];
  after.forEach((part, n) => {
    const here = before[n];
    if (!here) return old.append(part);
    sources.set(part, part.outerHTML);
    if (sources.get(here) === sources.get(part)) return;
    if (here.querySelector(".plot:hover")) return;
    if (part.tagName === "FORM" && here.tagName === "FORM") {
      here.querySelector("tbody").replaceWith(part.querySelector("tbody"));
      sources.set(here, sources.get(part));
      return;
    }
    const open = [...here.querySelectorAll("details")].map((one) => one.open);
    here.replaceWith(part);
    part.querySelectorAll("details").forEach((one, k) => { if (k < open.length) one.open = open[k]; });
  });
  before.slice(after.length).forEach((part) => part.remove());
}

async function update() {
  if (document.hidden) return;
  const address = new URL(location.href);
  address.searchParams.set("update", main.dataset.version);
  try {
    const answer = await fetch(address, { cache: "no-store" });
    live.textContent = answer.ok ? "live" : "cannot be read";
    live.className = answer.ok ? "" : "bad";
    if (answer.status !== 200) return ages();
    const made = document.createElement("main");
    made.innerHTML = await answer.text();
    renew(main, made);
    main.dataset.version = answer.headers.get("X-Version");
    restore();
  } catch {
    live.textContent = "not connected: watch has ended?";
    live.className = "bad";
  }
}

async function act(button, action) {
  if (action === "stop" && !confirm("Stop this run? It ends after the current step, with a checkpoint, and the same command continues it.")) return;
  button.disabled = true;
  const answer = await fetch(button.dataset.address, { method: "POST", headers: { "X-Confirm": action } });
  button.textContent = answer.ok || answer.status === 409 ? await answer.text() : "This could not be done.";
}

async function copy(button) {
  const code = button.closest("tr").querySelector("code");
  getSelection().selectAllChildren(code);  // also where the clipboard is not available
  try {
    await navigator.clipboard.writeText(code.textContent);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Selected";
  }
}

main.addEventListener("click", (event) => {
  if (event.target.matches(".copy")) copy(event.target);
  for (const action of ["stop", "predict"]) if (event.target.matches(`.${action}`)) act(event.target, action);
});
main.addEventListener("change", ({ target }) => {
  if (target.type === "checkbox") target.checked ? chosen.add(target.value) : chosen.delete(target.value);
});
main.addEventListener("input", ({ target }) => {
  if (target.id !== "filter") return;
  wanted = target.value.toLowerCase();
  restore();
});
for (const part of main.children) sources.set(part, part.outerHTML);
for (const box of main.querySelectorAll("input:checked")) chosen.add(box.value);
restore();
setInterval(update, EVERY_MS);
setInterval(ages, 5 * EVERY_MS);
document.addEventListener("visibilitychange", update);
