"""Workers in containers: the images of a site, and the bundle with which `runc` starts one worker."""
