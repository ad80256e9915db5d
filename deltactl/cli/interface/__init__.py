"""What the commands share: options, output, exit statuses, texts of help and man pages."""
