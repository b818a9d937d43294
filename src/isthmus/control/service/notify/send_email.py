"""`send_email`: one plain-text message by the operator's mail server."""

from __future__ import annotations

import smtplib
import ssl
from email.message import EmailMessage
from email.utils import formatdate

from isthmus.control.service.notify.notify_settings import SmtpSettings, read_password
from isthmus.control.service.notify.send_webhook import DeliveryError
from isthmus.core.text.printable import printable
from isthmus.core.views.notice_views import NoticeMessage

TIMEOUT_S = 15.0
MAX_SUBJECT_CHARS = 150


def send_email(
    settings: SmtpSettings, address: str, message: NoticeMessage, now_s: float, *, tls: ssl.SSLContext | None = None
) -> None:
    """Send a message to one address; return once the mail server has taken it. Raises `DeliveryError` if not.

    A message that is repeated has the same `Message-ID`, by which mail servers know it.
    """
    mail = make_email(settings.sender, address, message, now_s)
    context = tls or ssl.create_default_context()
    try:
        if settings.security == "tls":
            connection: smtplib.SMTP = smtplib.SMTP_SSL(
                settings.host, settings.used_port, timeout=TIMEOUT_S, context=context
            )
        else:
            connection = smtplib.SMTP(settings.host, settings.used_port, timeout=TIMEOUT_S)
        with connection:
            if settings.security == "starttls":
                connection.starttls(context=context)
            if settings.user:
                connection.login(settings.user, read_password(settings.password_file))
            connection.send_message(mail)
    except (OSError, smtplib.SMTPException, ValueError) as error:
        raise DeliveryError(
            f"the mail server {settings.host} did not take it: {printable(str(error))[:200]}"
        ) from error


def make_email(sender: str, address: str, message: NoticeMessage, now_s: float) -> EmailMessage:
    """Return the mail of a message: one line for each notice."""
    mail = EmailMessage()
    mail["From"], mail["To"] = sender, address
    mail["Subject"] = _subject(message)
    mail["Date"] = formatdate(now_s)
    mail["Message-ID"] = f"<{message.id}@{sender.rpartition('@')[2]}>"
    mail["Auto-Submitted"] = "auto-generated"
    lines = []
    for one in message.notices:
        where = " at ".join(part for part in (one.job and f"job {one.job}", one.site) if part)
        text = f": {printable(one.text)}" if one.text else ""
        lines.append(f"{formatdate(one.at_s)}  {one.kind}  {printable(where)}{text}")
    more = [f"{message.dropped} older notices were dropped."] if message.dropped else []
    mail.set_content("\n".join([*lines, *more, "", "isthmus notify show, isthmus notify remove"]))
    return mail


def _subject(message: NoticeMessage) -> str:
    first = message.notices[0]
    more = f" and {len(message.notices) - 1} more" if len(message.notices) > 1 else ""
    return printable(f"Isthmus: {first.job or first.site} {first.kind}{more}")[:MAX_SUBJECT_CHARS]
