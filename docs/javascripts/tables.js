// A table that is wider than the page scrolls sideways; by the keyboard, too.
document$.subscribe(() => {
  for (const each of document.querySelectorAll(".md-typeset__scrollwrap")) {
    Object.assign(each, { tabIndex: 0, role: "group", ariaLabel: "Table" });
  }
});
