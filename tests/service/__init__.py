"""The whole stage in process, against engines that do what a test says."""
