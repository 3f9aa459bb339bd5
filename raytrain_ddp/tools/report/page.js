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
  const [tip, text, script] = plot.querySelectorAll("div, span, script");
  const values = JSON.parse(script.textContent);
  plot.onpointerleave = () => tip.removeAttribute("style");
  plot.onpointermove = (event) => {
    const box = plot.getBoundingClientRect(), x = (event.clientX - box.left) / box.width;
    const [at, texts] = values.findLast(([at]) => at < x + 0.01) ?? values[0];
    const shown = texts.filter(([run]) => !boxes.some((one) => one.name === run && !one.checked));
    text.innerText = shown.map(([, text]) => text).join("\n");
    const [side, way] = at < 0.5 ? ["left", at] : ["right", 1 - at];
    tip.style = `display: block; border-${side}-width: 1px; ${side}: ${100 * way}%`;
  };
}
