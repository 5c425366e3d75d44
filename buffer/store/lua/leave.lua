-- A server says goodbye. args: server, incarnation; of an earlier one, late, it means nothing. Returns how many tickets and
-- slices of an evaluation it had held: they come back at once.
if redis.call('HGET', key('incarnations'), args.server) ~= args.incarnation then return 0 end
local tickets, slices = dismiss(args.server, 'server ' .. args.server .. ' stopped')
return tickets + slices
