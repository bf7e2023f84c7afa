"""A plan and what became of it, as one HTML page that opens without a network."""

from autoshard.report.data import ReportData
from autoshard.report.from_plan import report_data
from autoshard.report.page import render_report, write_report

__all__ = ["ReportData", "render_report", "report_data", "write_report"]
