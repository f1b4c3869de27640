"""placeholder"""

from zerosim.records.plan_grid import Grid


def page(grid: Grid) -> str:
    return ""
