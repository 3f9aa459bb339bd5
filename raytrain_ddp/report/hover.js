// Shows what a panel's lines are where the pointer is. Without it, all is there but this.
for (const plot of document.querySelectorAll(".plot")) {
  const values = JSON.parse(plot.querySelector("script").textContent);
  if (!values.length) continue;
  const cross = document.createElement("div"), tip = document.createElement("div");
  cross.className = "cross";
  tip.className = "tip";
  cross.hidden = tip.hidden = true;
  plot.append(cross, tip);
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
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
  plot.addEventListener("pointerleave", () => { cross.hidden = tip.hidden = true; });
}
