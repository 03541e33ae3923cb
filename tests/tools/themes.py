"""Four terminal themes: background, text and the 16 colours, as terminals ship them."""

from __future__ import annotations

from rich.terminal_theme import TerminalTheme

Rgb = tuple[int, int, int]


def _rgb(code: str) -> Rgb:
    return int(code[:2], 16), int(code[2:4], 16), int(code[4:], 16)


def _theme(background: str, foreground: str, colours: str) -> TerminalTheme:
    each = [_rgb(code) for code in colours.split()]
    return TerminalTheme(_rgb(background), _rgb(foreground), each[:8], each[8:])


_XTERM = (
    "000000 cd0000 00cd00 cdcd00 0000ee cd00cd 00cdcd e5e5e5 7f7f7f ff0000 00ff00 ffff00 5c5cff ff00ff 00ffff ffffff"
)
_SOLARIZED = (
    "073642 dc322f 859900 b58900 268bd2 d33682 2aa198 eee8d5 002b36 cb4b16 586e75 657b83 839496 6c71c4 93a1a1 fdf6e3"
)
THEMES = {
    "dark": _theme("000000", "e5e5e5", _XTERM),
    "light": _theme("ffffff", "000000", _XTERM),
    "solarized-dark": _theme("002b36", "839496", _SOLARIZED),
    "solarized-light": _theme("fdf6e3", "657b83", _SOLARIZED),
}
