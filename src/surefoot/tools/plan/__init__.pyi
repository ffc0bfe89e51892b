from .schedule_plot import plot_schedules as plot_schedules
