// Shows what a panel's lines are where the pointer is. Without it, all is there but this.
// One listener for all panels, also for those that are put into the page later.
let shown = null;
const hide = () => {
  if (shown) shown.cross.hidden = shown.tip.hidden = true;
  shown = null;
};
document.addEventListener("pointermove", (event) => {
  const plot = event.target.closest(".plot");
  if (!plot) return hide();
  if (!shown || shown.plot !== plot) {
    hide();
    const values = JSON.parse(plot.querySelector("script").textContent);
    if (!values.length) return;
    const [cross, tip] = ["cross", "tip"].map((name) => {
      const made = plot.querySelector("." + name) || document.createElement("div");
      made.className = name;
      plot.append(made);
      return made;
    });
    shown = { plot, values, cross, tip };
  }
  const { values, cross, tip } = shown, box = plot.getBoundingClientRect();
  const x = (1000 * (event.clientX - box.left)) / box.width;
  let best = values[0];
  for (const one of values) if (Math.abs(one[0] - x) < Math.abs(best[0] - x)) best = one;
  cross.hidden = tip.hidden = false;
  tip.textContent = best[1];
  cross.style.left = best[0] / 10 + "%";
  const left = (best[0] / 1000) * box.width;
  const flip = left + tip.offsetWidth + 14 > box.width;
  tip.style.left = Math.max(-40, flip ? left - tip.offsetWidth - 10 : left + 10) + "px";
});
document.documentElement.addEventListener("pointerleave", hide);
