// Shows values at the pointer, and hides the curves of runs whose box is not checked.
const boxes = [...document.querySelectorAll("input")];
for (const box of boxes) {
  box.onchange = () => {
    sessionStorage[box.value] = box.checked ? "" : "hidden";
    for (const one of document.querySelectorAll(`#${box.name}, .${box.name}`)) one.style.opacity = +box.checked;
  };
  box.checked = !sessionStorage[box.value];
  box.onchange();
}
for (const plot of document.querySelectorAll(".plot")) {
  const values = JSON.parse(plot.querySelector("script").textContent);
  const tip = document.createElement("div"), text = document.createElement("span");
  tip.className = "tip";
  tip.append(text);
  plot.append(tip);
  plot.onpointerleave = () => tip.removeAttribute("style");
  plot.onpointermove = (event) => {
    const box = plot.getBoundingClientRect(), x = (event.clientX - box.left) / box.width;
    const [at, texts] = values.reduce((a, b) => (Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a));
    const off = boxes.filter((one) => !one.checked).map((one) => one.name);
    text.innerText = texts.filter(([run]) => !off.includes(run)).map(([, text]) => text).join("\n");
    const [side, way] = at < 0.5 ? ["left", at] : ["right", 1 - at];
    tip.style = `display: block; border-${side}-width: 1px; ${side}: ${100 * way}%`;
  };
}
