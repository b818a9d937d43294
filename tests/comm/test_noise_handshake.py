"""Rules of the handshake and its records: the published test vector, and what changes nothing but fails."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from isthmus.noise import CipherState, NoiseHandshake, UnauthenticatedError

PSK, PROLOGUE = b"This is my Austrian perspective!", b"John Galt"

# Noise_NNpsk0_25519_AESGCM_SHA256 of the vectors "cacophony": payloads and messages, the handshake's first.
EPHEMERALS = (
    "893e28b9dc6ca8d611ab664754b8ceb7bac5117349a4439a6b0569da977c464a",
    "bbdb4cdbd309f1a1f2e1456967fe288cadd6f712d65dc7b7793d5e63da6b375b",
)
HASH = "9f3b1f9afd7767767b5b9d1069844a6154fdbdcc36dfb3e31c0fffc5c973d530"
MESSAGES = [
    (
        "4c756477696720766f6e204d69736573",
        (
            "ca35def5ae56cec33dc2036731ab14896bc4c75dbb07a61f879f8e3afa4c79447c37a89fc17813788d30df2d59501d60"
            "66f5f8aecc3406bbd9829f2d24a531b1"
        ),
    ),
    (
        "4d757272617920526f746862617264",
        (
            "95ebc60d2b1fa672c1f46a8aa265ef51bfe38e7ccb39ec5be34069f1448088432f29d79368ef9de4e1ae7a362fb05bf0"
            "ad668e026bf5714554497b3a720461"
        ),
    ),
    ("462e20412e20486179656b", "7c01e898a6201f36aecee532e29cd0b7f8ffa29d3366ad0dce39a6"),
    ("4361726c204d656e676572", "a9ff535aace3db6a1da1a7fb00fe2de2622bb373abad9fb42c00e0"),
    ("4a65616e2d426170746973746520536179", "6cfc49a3e65472edc2d0152abe5ce950170a8a47c959f30bd48b5f0aacf29adbfd"),
    (
        "457567656e2042f6686d20766f6e2042617765726b",
        "9bc86e6d974ed21ba04604a94aa68de21677eb409ead070c0cd569b069ee19ba142aa4c1a9",
    ),
]


def sides(psk: bytes = PSK, prologue: bytes = PROLOGUE) -> tuple[NoiseHandshake, NoiseHandshake]:
    """Return dialler and listener of the test vector; `psk` and `prologue` are the listener's."""
    own = [X25519PrivateKey.from_private_bytes(bytes.fromhex(key)) for key in EPHEMERALS]
    return NoiseHandshake(PSK, PROLOGUE, own[0]), NoiseHandshake(psk, prologue, own[1])


def test_the_published_vector_is_met() -> None:
    """Handshake, its hash, and the records of both directions are those of the published vector, and are read back."""
    dialler, listener = sides()
    (first, first_sealed), (second, second_sealed), *records = [
        (bytes.fromhex(plain), bytes.fromhex(sealed)) for plain, sealed in MESSAGES
    ]
    assert dialler.write_first(first) == first_sealed
    assert listener.read_first(first_sealed) == first
    assert listener.write_second(second) == second_sealed
    assert dialler.read_second(second_sealed) == second
    assert dialler.hash == listener.hash == bytes.fromhex(HASH)
    there, back = zip(dialler.split(), listener.split(), strict=True)
    for place, (plain, sealed) in enumerate(records):
        sender, receiver = there if place % 2 == 0 else back[::-1]
        assert sender.encrypt(plain) == sealed
        assert receiver.decrypt(sealed) == plain


@pytest.mark.parametrize("change", [{"psk": bytes(32)}, {"prologue": b"other"}])
def test_another_key_or_prologue_opens_nothing(change: dict[str, bytes]) -> None:
    """The first message of a dialler proves the key and what both sides agree on."""
    dialler, listener = sides(**change)
    with pytest.raises(UnauthenticatedError):
        listener.read_first(dialler.write_first(b"x"))


def test_a_public_key_of_low_order_is_no_key() -> None:
    """A dialler cannot force the shared secret to zero (RFC 7748, section 6.1)."""
    dialler, _ = sides()
    dialler.write_first(b"")
    with pytest.raises(UnauthenticatedError):
        dialler.read_second(bytes(48))


def test_every_changed_bit_of_a_record_is_noticed() -> None:
    """So is a record that is cut, repeated, or out of order; `decrypt_into` has the same rules as `decrypt`."""
    sealed = CipherState(bytes(32)).encrypt(b"12345678")
    for bit in range(8 * len(sealed)):
        changed = bytearray(sealed)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(UnauthenticatedError):
            CipherState(bytes(32)).decrypt_into(memoryview(changed), memoryview(bytearray(8)))
    with pytest.raises(UnauthenticatedError):
        CipherState(bytes(32)).decrypt(sealed[:-1])
    twice = CipherState(bytes(32))
    into = bytearray(8)
    twice.decrypt_into(memoryview(sealed), memoryview(into))
    assert into == b"12345678"
    with pytest.raises(UnauthenticatedError):
        twice.decrypt(sealed)


def test_keys_change_at_the_same_record_on_both_sides() -> None:
    """After each `rekey_records` records the key is another one; the other side follows, one that does not fails."""
    sender, receiver, left_behind = CipherState(bytes(32), 3), CipherState(bytes(32), 3), CipherState(bytes(32))
    for number in range(10):
        into = bytearray(17)
        sender.encrypt_into(b"x", memoryview(into))
        assert receiver.decrypt(bytes(into)) == b"x"
        if number < 3:
            left_behind.decrypt(bytes(into))
    with pytest.raises(UnauthenticatedError):
        left_behind.decrypt(bytes(into))
