from .schedule_plot import plot_schedules

__all__ = ["plot_schedules"]
