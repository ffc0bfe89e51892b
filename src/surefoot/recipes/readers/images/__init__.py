"""Image data sets: arrays, class directories, files, and augmentation."""
