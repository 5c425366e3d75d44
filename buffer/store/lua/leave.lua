-- Removes a server that stops. args: server, incarnation, sampled (its tokens of tickets in progress, see report_tokens); a
-- late message of an earlier incarnation has no effect.
-- Returns the number of tickets and slices of an evaluation that it held; they are available again at once.
if redis.call('HGET', key('incarnations'), args.server) ~= args.incarnation then return 0 end
report_tokens(args.server, args.sampled)
local tickets, slices = remove_server(args.server, 'server ' .. args.server .. ' stopped', 'server_stopped')
return tickets + slices
