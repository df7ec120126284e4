"""A run as a table, as a trace file for Perfetto, and as a page."""

from batch_manager.pictures.chrome_trace import chrome_trace
from batch_manager.pictures.cluster_page import cluster_page, goodput_svg
from batch_manager.pictures.html_page import html_page
from batch_manager.pictures.table import IterationTable, table_csv, table_text
from batch_manager.pictures.timeline import IterationRecord, RequestTrack, Span, SpanKind, Timeline

__all__ = [
    "IterationRecord",
    "IterationTable",
    "RequestTrack",
    "Span",
    "SpanKind",
    "Timeline",
    "chrome_trace",
    "cluster_page",
    "goodput_svg",
    "html_page",
    "table_csv",
    "table_text",
]
