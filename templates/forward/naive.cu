/* @{ header }@ */
