"""What a command's progress is told."""


class Heard:
    """Keeps what is told; it hears of no stages."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def tell(self, text: str) -> None:
        self.texts.append(text)

    def stage(self, name: str, total: int, unit: str) -> None: ...
    def advance(self, amount: int = 1, note: str = "") -> None: ...
    def shorten(self, total: int) -> None: ...
    def part(self, name: str, number: int, total: int) -> None: ...
