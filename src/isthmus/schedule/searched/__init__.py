"""Search for the schedule that ends earliest on a given pipeline, within each stage's memory."""

from isthmus.schedule.searched.order_text import schedule_of_text, text_of_schedule
from isthmus.schedule.searched.pipeline_costs import Hop, PipelineCosts, StageCosts
from isthmus.schedule.searched.search_schedule import SearchedSchedule, search_schedule

__all__ = [
    "Hop",
    "PipelineCosts",
    "SearchedSchedule",
    "StageCosts",
    "schedule_of_text",
    "search_schedule",
    "text_of_schedule",
]
