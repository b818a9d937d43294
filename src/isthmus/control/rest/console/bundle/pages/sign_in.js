// Sign in with a token, or at the pool's provider. A token stays in memory until it is sent, and is kept nowhere.

import { beginSignIn, finishSignIn, request, signIn, takeAnswer } from "../lib/api.js";
import { useAction } from "../lib/live.js";
import { html, Problem, useEffect, useRef, useState } from "../lib/ui.js";

export function SignInPage({ ended }) {
  const field = useRef(null);
  const { busy, error, run } = useAction();
  const [issuer, setIssuer] = useState(null);
  useEffect(() => {
    document.title = "Sign in - Isthmus";
    field.current.focus();
    request("GET", "/v1/oidc", undefined, {}).then(([found]) => setIssuer(found.issuer), () => {});
    const answer = takeAnswer();
    if (answer) run(() => answer.refused ? Promise.reject(refusal(answer.refused)) : finishSignIn(answer));
  }, []);
  const submit = (event) => {
    event.preventDefault();
    run(() => signIn(field.current.value.trim())).finally(() => {
      if (field.current) field.current.value = "";
    });
  };
  return html`<main class="signin">
    <p class="brand">Isthmus</p>
    <h1>Sign in</h1>
    <p class="lead">With a token of the pool: ${html`<code>isthmus token create --user NAME</code>`}</p>
    <section aria-label="Sign in"><form onSubmit=${submit}>
      ${ended && html`<p role="status">The session has ended. Sign in again.</p>`}
      <label for="token">Token</label>
      <input id="token" ref=${field} type="password" autocomplete="off" required spellcheck="false" maxlength="400"/>
      <div class="row"><button disabled=${busy}>Sign in</button>
        ${issuer && html`<button type="button" class="plain" disabled=${busy} onClick=${() => run(beginSignIn)}>Sign in at ${new URL(issuer).host}</button>`}
      </div>
      <${Problem} error=${error}/>
    </form></section>
    <p class="hint">A session ends after 12 hours, when you sign out, or when its token is revoked.</p>
  </main>`;
}

function refusal(code) {
  return Object.assign(new Error(`the provider refuses the sign-in: ${code}`), { hint: "Sign in again." });
}
