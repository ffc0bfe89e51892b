"""Images: arrays, folders, files, and augmentation."""
