// Shows values at the pointer, and hides the curves of runs whose box is not checked.
const boxes = [...document.querySelectorAll("input")];
const hidden = new Set(JSON.parse(sessionStorage.hidden || "[]"));
function renew() {
  for (const box of boxes) {
    box.checked = !hidden.has(box.value);
    for (const one of document.getElementsByClassName(box.name)) one.style.opacity = box.checked ? "" : 0;
  }
  sessionStorage.hidden = JSON.stringify([...hidden]);
}
for (const box of boxes) box.onchange = () => { hidden[box.checked ? "delete" : "add"](box.value); renew(); };
renew();
for (const plot of document.querySelectorAll(".plot")) {
  const [cross, tip] = ["cross", "tip"].map((name) => Object.assign(document.createElement("div"), { className: name, hidden: true }));
  const values = JSON.parse(plot.querySelector("script").textContent);
  if (!values.length) continue;
  plot.append(cross, tip);
  plot.onpointerleave = () => { cross.hidden = tip.hidden = true; };
  plot.onpointermove = (event) => {
    const box = plot.getBoundingClientRect(), x = (event.clientX - box.left) / box.width;
    const [at, texts] = values.reduce((a, b) => (Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a));
    const off = boxes.filter((one) => !one.checked).map((one) => one.name);
    tip.textContent = texts.filter(([run]) => !off.includes(run)).map(([, text]) => text).join("\n");
    cross.hidden = tip.hidden = false;
    cross.style.left = 100 * at + "%";
    const left = at * box.width, flip = left + tip.offsetWidth + 14 > box.width;
    tip.style.left = Math.max(0, flip ? left - tip.offsetWidth - 10 : left + 10) + "px";
  };
}
