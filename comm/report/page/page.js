// Of all panels of rank x rank pictures show the one that the two lists name.
const form = document.querySelector("form.choose");
if (form) {
  const panels = [...document.querySelectorAll("details.panel")];
  const { phase, layer } = form.elements;
  const show = () => {
    const found = panels.filter((panel) => panel.dataset.phase === phase.value);
    const wanted = found.find((panel) => panel.dataset.layer === layer.value) || found[0];
    for (const panel of panels) panel.hidden = panel !== wanted;
    for (const option of layer.options)
      option.disabled = !found.some((panel) => panel.dataset.layer === option.value);
    layer.value = wanted.dataset.layer;
    wanted.open = true;
  };
  form.hidden = false;
  form.addEventListener("change", show);
  form.addEventListener("submit", (event) => event.preventDefault());
  show();
}
