"use strict";
(() => {
  const embed = async (figure) => {
    const chart = figure.querySelector(".chart");
    const spec = JSON.parse(figure.querySelector('script[type="application/json"]').textContent);
    await window.vegaEmbed(chart, spec, { renderer: "svg", actions: false, tooltip: { theme: "custom" } });
    walk(chart, figure.querySelector(".reading"));
    chart.dataset.drawn = "yes";
  };

  // Arrow keys go from point to point and read each of them out.
  const walk = (chart, reading) => {
    let place = -1;
    chart.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      const marks = [...chart.querySelectorAll('[role="graphics-symbol"][aria-label]')].filter(
        (mark) => !/line mark|trail mark|area mark/.test(mark.getAttribute("aria-roledescription") || ""));
      if (!step || !marks.length) return;
      event.preventDefault();
      place = (place + step + marks.length) % marks.length;
      reading.textContent = marks[place].getAttribute("aria-label");
    });
  };

  const button = document.getElementById("theme");
  const root = document.documentElement;
  const isDark = () =>
    (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const label = () => { button.textContent = isDark() ? "Light colors" : "Dark colors"; };
  button.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; label(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", label);
  label();

  // On paper nothing can be opened: open everything first.
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((part) => { part.open = true; }));

  Promise.all([...document.querySelectorAll("figure")].map(embed)).then(() => { root.dataset.ready = "yes"; });
})();
