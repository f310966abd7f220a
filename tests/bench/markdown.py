"""Reads the tables that the benchmark prints."""


def parse_markdown(table: str) -> tuple[list[str], list[str], list[list[str]]]:
    """(header, rule, rows) of a pipe table; a bar behind a backslash parts no cells."""
    lines = [
        [cell.strip().replace("\0", "|") for cell in line.replace("\\|", "\0").strip("|").split("|")]
        for line in table.splitlines()
    ]
    return lines[0], lines[1], lines[2:]
