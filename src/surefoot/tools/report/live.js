// Replaces the body without a reload: scroll position, toggles, focus and open details stay.
(function () {
  var tag = "", timer = 0;
  function key(one) {
    var figure = one.closest("figure,article"), label = one.closest("label,details,button").textContent;
    return (figure ? figure.id : "") + "\n" + label.trim().split("\n")[0];
  }
  function exchange(body) {
    var before = new Map(), all = "input,details,button", focus = document.activeElement;
    focus = focus.matches("input,button") ? key(focus) : "";
    document.querySelectorAll(all).forEach(function (one) {
      before.set(key(one) + one.tagName, one);
    });
    document.body.replaceChildren.apply(document.body, body.childNodes);
    document.querySelectorAll(all).forEach(function (one) {
      var old = before.get(key(one) + one.tagName);
      if (old && one.matches("input") && !one.dataset.run) one.checked = old.checked;
      if (old && one.matches("details")) one.open = old.open;
      if (focus && one.matches("input,button") && key(one) === focus) one.focus({preventScroll: true});
    });
  }
  function later() {
    clearTimeout(timer);
    timer = setTimeout(look, EVERY_MS);
  }
  function look() {
    clearTimeout(timer);
    var asked = location.search;
    fetch(location.pathname + asked, {headers: tag ? {"If-None-Match": tag} : {}, cache: "no-store"}).then(function (answer) {
      tag = answer.headers.get("ETag") || "";
      return answer.status === 200 ? answer.text() : "";
    }).then(function (text) {
      if (text && asked === location.search) {
        var page = new DOMParser().parseFromString(text, "text/html");
        document.documentElement.dataset.state = page.documentElement.dataset.state;
        document.title = page.title;
        exchange(page.body);
      }
      later();
    }).catch(later);
  }
  document.addEventListener("change", function (event) {
    if (!event.target.dataset.run) return;
    var asked = new URLSearchParams(location.search), run = event.target.dataset.run;
    var runs = asked.getAll("run").filter(function (one) { return one !== run; });
    if (event.target.checked) runs.push(run);
    history.replaceState(null, "", "?" + runs.map(function (one) { return "run=" + one; }).join("&"));
    look();
  });
  document.addEventListener("click", function (event) {
    var button = event.target.closest("button[data-ask]");
    if (!button || (button.dataset.sure && !confirm(button.dataset.sure))) return;
    button.disabled = true;
    fetch(location.pathname + button.dataset.ask, {method: "POST", body: button.dataset.key}).then(look, look);
  });
  later();
})();
